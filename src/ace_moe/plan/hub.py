"""Plans on the hub: a repository with plan.safetensors and a card, fetched into the cache or published."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, ModelCardData, get_token, hf_hub_download
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import AceError, OptionError, OutputError, PlanError, brief
from ..files import expand
from .cache import hub_folder
from .entries import labels
from .record import Plan

FILE, CARD = "plan.safetensors", "README.md"
LARGEST = 1 << 30  # bytes; plans of the largest models have a few MiB
WORD = r"\w[\w.-]*"
NAME = re.compile(rf"(?P<name>{WORD}/{WORD})(?:@(?P<revision>[\w./-]+))?")
LOG_IN = "log in with `hf auth login`"
USE = """\
# Plan of {model}

Thresholds for budgets for {model}, and the tables they need, for ace-moe (`pip install ace-moe`), which makes
Mixture-of-Experts models faster by leaving out expert slots that contribute little. No weights are in it.

    from ace_moe import ACE
    with ACE.load("{name}", skip={skip})(model):
        model.generate(**inputs)

    ace serve {base} --plan {name} --skip {skip}

The plan belongs to the model whose routers have the sha256 {routers}; another one is refused when it is attached.
It has {layers} MoE layers and the tables {tables}.
"""


def load_plan(plan: str | Path) -> Plan:
    """Load a plan from a file, or from a repository as `owner/name` or `owner/name@revision`; both pass every check."""
    if not isinstance(plan, (str, os.PathLike)):
        raise PlanError(
            f"A plan is loaded from a file or from owner/name of the hub, not from {type(plan).__name__}. `ACE(plan)` takes one "
            "that is loaded."
        )
    return Plan.load(located(plan))


def located(plan: str | Path) -> Path:
    """Find the file that is meant: one on this machine as it is, else a repository's, downloaded."""
    here, named = expand(plan), NAME.fullmatch(Path(plan).as_posix())
    if named is None or here.suffix == ".safetensors" or os.path.exists(here):
        return here
    return download(named["name"], named["revision"])


def download(name: str, revision: str | None = None) -> Path:
    """Fetch the plan of a repository into the cache; without a network, the one that was downloaded last."""
    try:
        size = hf_hub_download(name, FILE, revision=revision, cache_dir=hub_folder(), dry_run=True).file_size or 0
        if size > LARGEST:
            raise PlanError(f"{FILE} of {name} has {size / 1e9:.1f} GB, which no plan has. It was not fetched.")
        return Path(hf_hub_download(name, FILE, revision=revision, cache_dir=hub_folder()))
    except AceError:
        raise
    except Exception as error:  # the client raises its own classes, the network's and the system's
        raise PlanError(_no_plan(name, revision, error)) from error


def _no_plan(name: str, revision: str | None, error: Exception) -> str:
    """Say why there is no plan and what to do about it."""
    if is_offline_mode():
        why = f"is neither a file nor a plan kept from before, and HF_HUB_OFFLINE is set. Unset it to fetch {name}, or give"
        return f"{name} {why} the path of a plan."
    if isinstance(error, GatedRepoError):
        return f"{name} lets in only whom its owner admits. Ask for access on its page, and {LOG_IN}."
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {revision!r}. Name a branch, a tag or a commit of it, or none."
    if isinstance(error, RepositoryNotFoundError):
        where = f"There is no file {name} here, and no repository of that name on the hub that you may read."
        return f"{where} Check the name, {LOG_IN} for private ones, or make a plan with `ace plan MODEL`."
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return f"{name} has no {FILE}: nobody pushed a plan there. If it is a model, `ace plan {name}` makes one."
    return f"{name} is not a file here and could not be fetched from the hub ({brief(error)}). Check the network and try again."


def check_push(name: str) -> None:
    """Check all that can be known before long work: the name, the login, and that nothing of others is there."""
    named = NAME.fullmatch(name)
    if named is None or named["revision"]:
        raise OptionError(f"{name!r} is not the name of a repository. Give owner/name.")
    if is_offline_mode():
        raise OutputError(f"HF_HUB_OFFLINE is set, so nothing can be pushed to {name}. Unset it.")
    if get_token() is None:
        raise OutputError(f"Pushing to {name} needs an account: {LOG_IN}.")
    try:
        files = {f.rfilename for f in HfApi().model_info(name).siblings or []}
    except RepositoryNotFoundError:
        return
    except Exception as error:
        raise _not_pushed(name, error) from error
    if others := sorted(files - {FILE, CARD, ".gitattributes"}):
        raise OutputError(
            f"{name} holds {others[0]} and is not a repository of a plan; its card would be lost. Push to a name of its own."
        )


def push(plan: Plan, name: str, base_model: str | None = None, private: bool = False) -> str:
    """Publish a plan with a card that says what it is; returns the address of the commit."""
    check_push(name)
    files = {FILE: plan.to_bytes(), CARD: card(plan, name, base_model).encode()}
    try:
        HfApi().create_repo(name, private=private, exist_ok=True)
        added = [CommitOperationAdd(path, data) for path, data in files.items()]
        return str(HfApi().create_commit(name, added, commit_message=f"Plan of {_cell(plan.model)}").commit_url)
    except Exception as error:
        raise _not_pushed(name, error) from error


def _not_pushed(name: str, error: Exception) -> OutputError:
    return OutputError(
        f"The plan could not be pushed to {name} ({brief(error)}). Check the network, and that your login may write there; "
        "the plan file is unchanged."
    )


def card(plan: Plan, name: str, base_model: str | None = None) -> str:
    """Write README.md of a published plan, with metadata for the hub in front."""
    budgets, shown = sorted({t.budget for t in plan.thresholds}), labels(plan.workloads)
    tables = sorted({table for layer in plan.tables.values() for table in layer})
    facts = {"fingerprint": plan.fingerprint.routers.exact, "budgets": budgets, "tables": tables}
    tags = ["ace-moe", "mixture-of-experts"]
    metadata = ModelCardData(base_model=base_model, library_name="ace-moe", tags=tags, ace_moe=facts)
    use = USE.format(
        model=_cell(plan.model),
        name=name,
        base=base_model or "MODEL",
        skip=f"{min(budgets, key=lambda b: abs(b - 0.5), default=0.5):g}",
        routers=plan.fingerprint.routers.exact,
        layers=len(plan.layers),
        tables=", ".join(tables) or "(none)",
    )
    rows = [["policy", "gain", "budget", "realised", "KL (nats)", "text"], ["---"] * 6]
    for entry in plan.thresholds:
        policy = " ".join(map(_cell, (entry.policy, *entry.params.values())))
        kl = f"{entry.fidelity['kl']['value']:.4f}" if entry.fidelity else "not measured"
        text = f"{_cell(shown[entry.workload.sha256])}, {entry.workload.tokens:,} tokens"
        rows.append([policy, _cell(entry.gain), f"{entry.budget:.1%}", f"{entry.realised:.2%}", kl, text])
    thresholds = "".join(f"| {' | '.join(row)} |\n" for row in rows) if plan.thresholds else "No thresholds yet.\n"
    return f"---\n{metadata.to_yaml()}\n---\n{use}\n{thresholds}"


def _cell(text: object) -> str:
    """Make one cell of a table: names of models and texts are whatever somebody typed."""
    shown = "".join(c if c.isprintable() and c not in "|<>[]`" else " " for c in str(text))
    return " ".join(shown.split()) or "a model"
