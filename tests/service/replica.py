"""One service process as others see it: the real app under uvicorn, on a port of its own, in a thread."""

from __future__ import annotations

import threading
from typing import Any

import uvicorn

from foreshock_service.app import create_app
from tests.servers import wait_for


class Replica:
    """Listens when it is made; `app.state.rooms` are its rooms."""

    def __init__(self, settings: Any) -> None:
        self.app = create_app(settings)
        self.port = settings.port
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=self.port, log_config=None, lifespan="on"))
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        wait_for(lambda: self.server.started)

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(20)
