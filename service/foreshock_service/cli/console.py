"""rich's console for what others wrote: rich itself leaves escape sequences in a text as they are."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from foreshock_service.terminal import safe


class SafeConsole(Console):
    """A console whose texts cannot act on the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's, each piece of text made safe."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(safe(segment.text), segment.style)
