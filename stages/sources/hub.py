"""Models and data from the Hugging Face Hub, pinned by revision."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from configs import Config
from stages.base import StageError
from stages.sources import folders

TIMEOUT = 5.0
"""Seconds in which the hub has to answer."""

Name = Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")]
Choose = Callable[[Sequence[str]], list[str]]


class _Repository(Config):
    repo: Name
    """``owner/name``."""

    revision: Annotated[str, Field(min_length=1)]
    """A commit, tag or branch. A commit alone names the same files for ever; what the others meant
    when they were fetched stands in ``source.json``."""


class HubModel(_Repository):
    """A model repository."""

    kind: Literal["hub_model"] = "hub_model"


class HubData(_Repository):
    """Files of a data set repository."""

    kind: Literal["hub_data"] = "hub_data"

    files: Annotated[tuple[str, ...], Field(min_length=1)]
    """Patterns of file names, in which ``*`` also stands for ``/``."""


def bring_model(source: HubModel, into: Path) -> dict[str, Any]:
    """Link or copy what belongs to the model out of the hub's local cache, filled as needed."""
    place = f"{source.repo}@{source.revision}"
    snapshot = _snapshot(source, "model", lambda names: folders.choose(names, place=place))
    for name in snapshot.names:
        folders.link(snapshot.folder / name, into / name)
    folders.require_shards(into, snapshot.names, place=place)
    folders.require_known_architecture(into, place=place)
    folders.require_sound(into, place=place)
    return {"commit": snapshot.commit}


def bring_data(source: HubData, into: Path) -> dict[str, Any]:
    """Copy the matching files out of the hub's local cache, filled as needed."""

    def choose(names: Sequence[str]) -> list[str]:
        found = [name for name in names if any(fnmatchcase(name, p) for p in source.files)]
        if not found:
            raise StageError(
                f"{source.repo}@{source.revision}: no file matches {', '.join(source.files)}; "
                f"it has {', '.join(names[:8])}{', ...' * (len(names) > 8)}"
            )
        return found

    snapshot = _snapshot(source, "dataset", choose, needed=source.files)
    for name in snapshot.names:
        folders.copy(snapshot.folder / name, into / name)
    return {"commit": snapshot.commit}


@dataclass(frozen=True)
class _Snapshot:
    """Files of one commit in the local cache."""

    folder: Path
    names: Sequence[str]

    @property
    def commit(self) -> str:
        return self.folder.name


def _snapshot(
    source: _Repository, repo_type: str, choose: Choose, *, needed: Sequence[str] = ()
) -> _Snapshot:
    """The chosen files of the revision, downloaded where the cache lacks them.

    Without the hub the cache must have all that the patterns ``needed`` match.
    """
    from huggingface_hub import HfApi, snapshot_download

    with _explained(source, repo_type) as unreachable:
        info = HfApi().repo_info(
            source.repo, repo_type=repo_type, revision=source.revision, timeout=TIMEOUT
        )
        names = choose(sorted(file.rfilename for file in info.siblings or []))
        folder = snapshot_download(
            source.repo,
            repo_type=repo_type,
            revision=source.revision,  # by name, so that the cache knows it too
            allow_patterns=names,
            etag_timeout=TIMEOUT,
        )
        return _Snapshot(Path(folder), names)
    folder = _cached(source, repo_type, needed, unreachable[0])
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    return _Snapshot(folder, choose(sorted(names)))


@contextmanager
def _explained(source: _Repository, repo_type: str) -> Iterator[list[str]]:
    """What the hub says as :class:`StageError`; that it says nothing goes into the list instead."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{'datasets/' * (repo_type == 'dataset')}{source.repo}"
    unreachable: list[str] = []
    try:
        yield unreachable
    except errors.GatedRepoError:
        raise StageError(
            f"{source.repo}: gated; accept its licence at {page}, then set HF_TOKEN to a token of "
            "the account that did (the token in use, if any, is of one that did not)"
        ) from None
    except errors.RepositoryNotFoundError:
        raise StageError(
            f"{source.repo}: no such {repo_type} at {constants.ENDPOINT}, or a private one; "
            "check the name, or set HF_TOKEN to a token that may read it"
        ) from None
    except errors.RevisionNotFoundError:
        raise StageError(
            f"{source.repo}: no revision {source.revision!r}; see {page}/tree/main for those it has"
        ) from None
    except errors.HfHubHTTPError as fault:
        if fault.response.status_code < 500:
            raise StageError(
                f"{source.repo}: {constants.ENDPOINT} refuses it ({_first_line(fault)}); "
                "if HF_TOKEN is set, check that it is valid and may read this"
            ) from None
        unreachable.append(_first_line(fault))
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as fault:
        unreachable.append(_first_line(fault))


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).split("\n")), "") or type(fault).__name__


def _cached(source: _Repository, repo_type: str, needed: Sequence[str], unreachable: str) -> Path:
    """The folder that an earlier download left in the cache; else the hub is missed."""
    from huggingface_hub import constants, errors, snapshot_download

    try:
        folder = snapshot_download(
            source.repo,
            repo_type=repo_type,
            revision=source.revision,
            local_files_only=True,
            allow_patterns=list(needed),
        )
    except errors.LocalEntryNotFoundError:
        raise StageError(
            f"{source.repo}@{source.revision}: {constants.ENDPOINT} cannot be reached "
            f"({unreachable}) and the cache {constants.HF_HUB_CACHE} does not hold it; "
            "go online, or copy the files here and use a source of kind local_model or local_data"
        ) from None
    return Path(folder)
