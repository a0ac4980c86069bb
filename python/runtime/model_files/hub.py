"""Downloads models from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.errors import ConfigError
from runtime.log import writes_json

_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_model_id(name: str) -> bool:
    """Whether `name` has the form "owner/name"."""
    return _MODEL_ID.fullmatch(name) is not None


def download(model_id: str, revision: str | None, patterns: list[str], flag: str, folder: str | None = None) -> Path:
    """Download files of a model, or find them in the hub's own cache.

    Args:
        model_id: "owner/name".
        revision: branch, tag or commit.
        patterns: glob patterns of the files; none may match files that can contain code.
        flag: the flag that selects the model, for errors.
        folder: the download folder; the hub's own cache if None.

    Raises:
        ConfigError: the files cannot be downloaded; the message says what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    if writes_json():
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    try:
        ignored = ["*/*", "consolidated*"]
        return Path(snapshot_download(model_id, revision=revision, cache_dir=folder, allow_patterns=patterns, ignore_patterns=ignored))
    except GatedRepoError as error:
        raise ConfigError(f"{model_id} is gated: accept its terms on the hub, and log in with 'hf auth login' or set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"{model_id} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model_id!r} is not a local folder, and on the hub it is missing or private ('hf auth login' or HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{model_id} is not in the local cache and the hub cannot be reached ({_reason(error.__cause__ or error)}); "
            f"download it on a machine with a network and give the folder as {flag}"
        ) from error
    except Exception as error:  # the hub's client raises the errors of several HTTP libraries and of the file system
        raise ConfigError(
            f"{model_id} cannot be downloaded ({_reason(error)}); check the network, and the space and the permissions of the hub's cache, "
            "or name another folder as --download-dir"
        ) from error


def _reason(error: BaseException) -> str:
    """The text of an error in one line."""
    return (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split()) or type(error).__name__
