"""What was measured on vLLM, replayed against a node; each answer is a cold single run's.

Files that changed under a running server stand with the report about them (vllm#33791).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import safetensors.torch
import torch

from gpu_worker.serving.gate import DeniedError
from gpu_worker.serving.sequence import EngineError
from registry_service.domain.declaration import declaration_parse
from registry_service.domain.digests import digest_of
from registry_service.domain.manifest import CONFIG_PATH, DECLARATION_PATH, WEIGHT_PATH
from tests.integration import engine_world as ew
from tests.integration import soak_world as soak
from tests.integration.scene_world import Scene, right, says, start
from tests.waiting import deleted

pytestmark = pytest.mark.torch

Files = dict[str, bytes]
Tensors = dict[str, torch.Tensor]


def test_a_reload_in_place_under_one_name_leaves_no_stale_answer(
    scene: Scene, tmp_path: Path
) -> None:
    # One name and one session, whose alias moves to another version and back.
    session = str(uuid4())
    with soak.node_of(scene.registry, tmp_path, adapters=2) as world:
        for who in (scene.one, scene.two, scene.one, scene.two):
            running = start(scene, world, who, session=session)
            assert says(running) == scene.cold.says[who, 0]


def test_unloaded_and_loaded_again_it_finds_nothing_of_its_own(
    scene: Scene, tmp_path: Path
) -> None:
    with soak.node_of(scene.registry, tmp_path, adapters=1) as world:
        for who in (scene.one, scene.two, scene.one):
            running = start(scene, world, who)
            assert says(running) == scene.cold.says[who, 0]
            assert running.amount.reused == 0


def test_a_folder_that_is_deleted_stops_nobody(scene: Scene, tmp_path: Path) -> None:
    with soak.node_of(scene.registry, tmp_path, adapters=2) as world:
        assert right(scene, world, scene.one)
        deleted(tmp_path / "store")
        assert right(scene, world, scene.one, scene.base)


def test_a_version_of_another_shape_leaves_the_one_that_serves(
    scene: Scene, tmp_path: Path
) -> None:
    with soak.node_of(scene.registry, tmp_path, adapters=1) as world:
        assert right(scene, world, scene.one)
        wider = malformed(scene, tensors_of(lambda t: {n: torch.cat([v, v]) for n, v in t.items()}))
        for _ in range(2):
            with pytest.raises(DeniedError):
                start(scene, world, wider)
            assert right(scene, world, scene.one, scene.base)


def test_a_request_that_runs_while_its_name_moves_is_answered_by_the_one_it_began_with(
    scene: Scene, tmp_path: Path
) -> None:
    with soak.node_of(scene.registry, tmp_path / "alone", adapters=2) as world:
        alone = says(start(scene, world, scene.one, max_tokens=300))
    with soak.node_of(scene.registry, tmp_path / "moved", adapters=2) as world:
        with ew.lasting(world.node.engine):
            running = start(scene, world, scene.one, max_tokens=300)
            outputs = running.generations[0].tokens()
            first = next(outputs)
            assert right(scene, world, scene.two)
            assert not running.generations[0].ended
        assert [soak.WORDS[token] for token in (first, *outputs)] == alone


@pytest.mark.parametrize("model", ["../tiny/C", "/etc", "support-zh", "sha256:" + "0" * 64, ""])
def test_a_models_name_loads_and_chooses_nothing(scene: Scene, tmp_path: Path, model: str) -> None:
    with soak.node_of(scene.registry, tmp_path, adapters=2) as world:
        for who in (scene.base, scene.one):
            assert says(start(scene, world, who, model=model)) == scene.cold.says[who, 0]
        assert set(world.states()) == {scene.one.digest}


def tensors_of(change: Callable[[Tensors], Tensors]) -> Callable[[Files], Files]:
    """Changes the tensors of an adapter's weights."""

    def changed(files: Files) -> Files:
        tensors = change(safetensors.torch.load(files[WEIGHT_PATH]))
        return files | {WEIGHT_PATH: safetensors.torch.save(tensors)}

    return changed


def more_layers(tensors: Tensors) -> Tensors:
    return tensors | {name.replace(".1.", ".5."): part.clone() for name, part in tensors.items()}


def other_prefix(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def fewer_layers(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".1." not in name}


def half_a_pair(tensors: Tensors) -> Tensors:
    return dict(list(tensors.items())[1:])


def other_base(files: Files) -> Files:
    declared = declaration_parse(files[DECLARATION_PATH])
    other = declared.model_copy(update={"base_model_digest": digest_of(b"another base")})
    return files | {DECLARATION_PATH: other.to_bytes()}


def pickled(files: Files) -> Files:
    tensors = safetensors.torch.load(files[WEIGHT_PATH])
    content = pickle.dumps({name: tensor.tolist() for name, tensor in tensors.items()})
    return files | {WEIGHT_PATH: content}


def other_type(files: Files) -> Files:
    config = json.loads(files[CONFIG_PATH]) | {"peft_type": "LOHA"}
    return files | {CONFIG_PATH: json.dumps(config).encode()}


MALFORMED = {
    "six layers on a base of two": tensors_of(more_layers),
    "another prefix": tensors_of(other_prefix),
    "missing layers": tensors_of(fewer_layers),
    "half a pair": tensors_of(half_a_pair),
    "no tensor": tensors_of(lambda _: {}),
    "another base": other_base,
    "another type": other_type,
    "a pickle": pickled,
}


def malformed(scene: Scene, change: Callable[[Files], Files]) -> soak.Who:
    """A version that a registry admitted though it may not be."""
    files = change(scene.registry.artifacts[scene.one.digest].files)
    who = replace(scene.one, digest=scene.registry.publish(files), canary=None)
    scene.cold.prompts[who, 0] = scene.cold.prompts[scene.one, 0]
    return who


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_adapter_is_refused_though_its_verdict_holds(
    scene: Scene, tmp_path: Path, kind: str
) -> None:
    who = malformed(scene, MALFORMED[kind])
    with soak.node_of(scene.registry, tmp_path, adapters=1) as world:
        with pytest.raises(DeniedError):
            start(scene, world, who)
        assert world.states() == {}
        assert right(scene, world, scene.base, scene.one)


def test_an_adapter_of_nan_answers_nothing_and_spoils_nobody(scene: Scene, tmp_path: Path) -> None:
    nan = malformed(scene, tensors_of(lambda t: {n: v * torch.nan for n, v in t.items()}))
    with soak.node_of(scene.registry, tmp_path, adapters=2) as world:
        with ew.lasting(world.node.engine):
            beside = start(scene, world, scene.one, max_tokens=100)
            with pytest.raises(EngineError, match="not finite"):
                says(start(scene, world, nan))
        assert says(beside)[: soak.TOKENS] == scene.cold.says[scene.one, 0]
        assert right(scene, world, scene.one, scene.base)
