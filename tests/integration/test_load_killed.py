"""A node that is killed in the middle of a load starts again clean, and loads."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from tests.integration import serving_world as sw
from tests.integration.killed_world import KilledNode

# peft 0.21 uses what transformers 5.24 deprecates; the oracle is not ours to fix.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]

PROGRAM = """
    asked = False
    def pull(self, tenant, adapter, digest, into):
        # As the client does it: beside, and renamed when it is whole.
        self.asked = True
        staging = into.parent / f".{into.name}.0"
        super().pull(tenant, adapter, digest, staging)
        stand_at("pull")
        staging.rename(into)
from gpu_worker.serving import admission, bank
write, files_read = bank.Stack.write, admission.files_read
def stack_write(self, row, rows):
    write(self, row, rows)
    # The engine's check of itself writes rows, too.
    if fake.asked:
        stand_at("attach")
def files_read_and_stand(folder, files):
    stand_at("read")
    return files_read(folder, files)
bank.Stack.write = stack_write
admission.files_read = files_read_and_stand
"""


@pytest.mark.parametrize("step", ["pull", "read", "attach"])
def test_a_node_killed_in_a_load_starts_clean_and_loads(tmp_path: Path, step: str) -> None:
    node = KilledNode(tmp_path, PROGRAM, step)
    store = node.store / "adapters" / str(sw.TENANT_ID)
    hex_digest = node.digest.removeprefix("sha256:")
    proven = [hex_digest, f"{hex_digest}.json"]
    node.start()
    try:
        # Killed while this one waits for its adapter.
        killer = threading.Thread(target=node.kill_at_step)
        killer.start()
        with pytest.raises(httpx.TransportError):
            node.ask()
        killer.join()
    finally:
        node.end()
    left = sorted(path.name for path in store.iterdir())
    assert left == {"pull": [f".{hex_digest}.0"], "read": [hex_digest], "attach": proven}[step]

    node.go()
    node.start()
    try:
        assert httpx.get(f"{node.url}/v1/residency").json()["items"] == []
        # What was not proven goes: it may be anything's bytes.
        assert sorted(path.name for path in store.iterdir()) == (proven if step == "attach" else [])
        answer = node.ask()
        assert answer.status_code == 200, answer.text
        (item,) = httpx.get(f"{node.url}/v1/residency").json()["items"]
        assert (item["state"], item["references"]) == ("SERVING", 0)
        assert sorted(path.name for path in store.iterdir()) == proven
    finally:
        node.end()
