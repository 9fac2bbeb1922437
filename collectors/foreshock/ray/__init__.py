"""Commands on a Ray cluster: one named actor a run asks the service, and every worker carries out the same at one step.

    controller = foreshock.ray.Controller.start(run="math/qwen", world=8)  # driver, before the workers
    monitor = foreshock.ray.join(run="math/qwen", rank=rank, world=8)  # each worker, instead of foreshock.init

Needs Ray, the host's own (`foreshock[ray]`).
"""

from foreshock.ray.controller import Controller
from foreshock.ray.member import join

__all__ = ["Controller", "join"]
