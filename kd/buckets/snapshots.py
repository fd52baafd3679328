"""Models of a hub as files of this disk, in the cache of huggingface_hub."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kd.buckets.counting import DownloadCount, follow_download
from kd.buckets.inputs import forward_report

#: The name that huggingface_hub gives to the bar of a snapshot's bytes.
_BYTES_BAR = "huggingface_hub.snapshot_download"


def download_snapshot(model: str, revision: str | None, patterns: list[str]) -> Path:
    """Return the local folder of a model of the hub; download the files that are missing.

    A download that takes longer than two seconds is reported. Raises what huggingface_hub raises
    where the hub does not give the model.
    """
    from huggingface_hub import snapshot_download

    ask = partial(
        snapshot_download,
        model,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=["original/*"],
    )
    count = DownloadCount(model, _sum_missing_bytes(ask))
    found: list[str] = []

    def download() -> None:
        found.append(ask(tqdm_class=_make_bar_class(count)))

    follow_download(count, [download], forward_report)
    return Path(found[0])


def _sum_missing_bytes(ask: Callable[..., Any]) -> int | None:
    """Sum the bytes that a download would bring; None if the hub does not say."""
    try:
        files = ask(dry_run=True)
    # The download itself raises it again.
    except Exception:
        return None
    if isinstance(files, str):  # a hub that cannot be reached, and files that are here
        return None
    return sum(each.file_size for each in files if each.will_download)


def _make_bar_class(count: DownloadCount) -> type[Any]:
    """Make a class of bars that draw nothing and tell ``count`` the bytes of a snapshot."""
    from huggingface_hub.utils.tqdm import tqdm

    class CountingBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._counts = options.get("name") == _BYTES_BAR and options.get("unit") == "B"
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts:
                count.add(int(n or 0))
            return super().update(n)

    return CountingBar
