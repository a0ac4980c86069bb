"""Files that the benchmarks write while others read them."""

from __future__ import annotations

import threading
from pathlib import Path

from benchmark.whole_file import write_whole


def test_readers_see_whole_texts(tmp_path: Path) -> None:
    file, texts = tmp_path / "folder" / "config.json", ["a" * 100_000, "b" * 50_000]
    write_whole(file, texts[0])
    ended = threading.Event()

    def rewrite() -> None:
        for i in range(200):
            write_whole(file, texts[i % 2])
        ended.set()

    writer = threading.Thread(target=rewrite)
    writer.start()
    while not ended.is_set():
        assert file.read_text(encoding="utf-8") in texts
    writer.join()
    assert list(file.parent.iterdir()) == [file]
