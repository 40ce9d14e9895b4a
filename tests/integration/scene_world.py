"""A base, two versions of one tenant's adapter, and what each says alone on a fresh node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from gpu_worker.serving.openai_bodies import completion_parse
from gpu_worker.serving.running import Running
from tests.integration import serving_world as sw
from tests.integration import soak_world as soak
from tests.integration.load_world import LoadWorld


@dataclass(frozen=True)
class Scene:
    """What is published, and what each of a base and two adapters says alone."""

    registry: sw.FakeRegistry
    base: soak.Who
    one: soak.Who
    two: soak.Who
    cold: soak.Cold


def scene_make(root: Path) -> Scene:
    """Publish all under a folder and ask each of them alone."""
    registry = sw.FakeRegistry(root / "registry", soak.base_make(root / "base"))
    base = soak.Who(*soak.TENANTS[0])
    one, two = (soak.adapter_publish(registry, root / f"a{n}", n) for n in (0, 2))
    cold = soak.cold_runs(registry, root / "cold", [base, one, two])
    return Scene(registry, base, one, two, cold)


def start(
    scene: Scene,
    world: LoadWorld,
    who: soak.Who,
    number: int = 0,
    session: str | None = None,
    **fields: Any,
) -> Running:
    """One of the prompts, as it comes over HTTP; without a session, in one of its own."""
    node: Any = world.node
    body = soak.body_of(scene.cold.prompts[who, number], number, **fields)
    context = soak.context_of(scene.registry, who, body, session=session or str(uuid4()))
    running: Running = node.completions.start(context, body, completion_parse, request_id="r-1")
    return running


def says(running: Running) -> list[str]:
    """The words of the first answer."""
    return [soak.WORDS[token] for token in running.generations[0].tokens()]


def right(scene: Scene, world: LoadWorld, *people: soak.Who) -> bool:
    """Whether each gets what it gets alone."""
    return all(says(start(scene, world, who)) == scene.cold.says[who, 0] for who in people)


def files_swap(scene: Scene, world: LoadWorld) -> None:
    """Put the weights of the second adapter in the place of the first one's."""
    weights = world.node.store.folder(scene.one.key) / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(scene.registry.artifacts[scene.two.digest].files[weights.name])
