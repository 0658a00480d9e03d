"""The benchmark of serving beside llama.cpp, end to end on a tiny model."""

from pathlib import Path

import pytest

from bench.serve.__main__ import beside_llama_cpp
from tests.model.test_gguf_export import model_folder

pytest.importorskip("xllamacpp", reason="the peer llama.cpp needs: pip install xllamacpp")


@pytest.mark.slow
def test_both_servers_answer_the_same_requests(tmp_path: Path) -> None:
    model_folder(tmp_path / "folder", "llama")
    parts = beside_llama_cpp(tmp_path / "folder", rounds=1, new_tokens=16, file_types=("q4_1",))
    assert "SSE3 = 1" in parts["llama_cpp"] or "NEON = 1" in parts["llama_cpp"]
    found = parts["q4_1"]
    assert found["file_bytes"] > 0
    for batch in (1, 8):
        part = found[f"batch_{batch}"]
        assert part["new_tokens"] == 16 * batch
        speeds = part["tokens_per_s"]
        assert part["ratio_http"] == speeds["potstill_http"] / speeds["llama_cpp"] > 0
