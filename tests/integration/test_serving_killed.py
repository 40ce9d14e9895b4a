"""A node that is killed while it answers starts again clean: the same page, the same answer."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from registry_service.domain.digests import digest_of
from tests.integration.killed_world import KilledNode

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

# A first answer leaves a page; from then on the named step stands half way.
PROGRAM = """
from gpu_worker.serving.lanes import Lanes
from gpu_worker.serving.runner import Runner
from gpu_worker.serving.slot_files import SlotFiles
def standing(kind, name, step_name):
    real = getattr(kind, name)
    def stands(self, *arguments):
        result = real(self, *arguments)
        if (root / "answered").exists():
            stand_at(step_name)
        return result
    setattr(kind, name, stands)
standing(Runner, "forward", "forward")
standing(Lanes, "restore", "restore")
standing(SlotFiles, "write", "save")
"""


@pytest.mark.parametrize("step", ["forward", "restore", "save"])
def test_a_node_killed_while_it_answers_gives_the_same_answer_after_a_restart(
    tmp_path: Path, step: str
) -> None:
    node = KilledNode(tmp_path, PROGRAM, step)

    def pages() -> dict[str, str]:
        found = (node.store / "slots").glob("*.page")
        return {path.name: digest_of(path.read_bytes()) for path in found}

    node.start()
    try:
        first = node.ask()
        assert first.status_code == 200, first.text
        # Last comes the table of pages.
        node.until((node.store / "slots" / "index").exists)
        before = pages()
        assert len(before) == 1
        (tmp_path / "answered").write_text("")
        if step == "save":
            # The answer does not wait for its page, and is out whenever that is saved.
            assert node.ask().json()["choices"] == first.json()["choices"]
            node.kill_at_step()
        else:
            killer = threading.Thread(target=node.kill_at_step)
            killer.start()
            with pytest.raises(httpx.TransportError):
                node.ask()
            killer.join()
    finally:
        node.end()
    assert before.items() <= pages().items()
    assert len(pages()) == 1 + (step == "save")

    node.go()
    node.start()
    try:
        assert httpx.get(f"{node.url}/v1/residency").json()["items"] == []
        again = node.ask()
        assert again.json()["choices"] == first.json()["choices"]
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        (item,) = httpx.get(f"{node.url}/v1/residency").json()["items"]
        assert (item["state"], item["references"]) == ("SERVING", 0)
        node.until(lambda: len(pages()) == 1)
    finally:
        node.end()
