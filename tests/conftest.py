"""What many tests share: the embedded model, its plan and a few windows of text."""

import importlib.util
import os
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
from transformers import PreTrainedModel
from transformers.utils import logging

import ace_moe
from ace_moe.checkpoint.loading import load_model, load_tokenizer, load_windows
from ace_moe.demo import MODEL, TEXT
from ace_moe.plan import Plan
from ace_moe.tables import PAPER
from ace_moe.text import Windows
from interpreted import plain_masks
from support import pytest_addoption, pytest_configure, tried

__all__ = ["pytest_addoption", "pytest_configure", "tried"]  # hooks and a fixture

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    plain_masks()
logging.disable_progress_bar()
# no test may depend on how fast the machine is; where a result decides whether work lands, examples are the same each time
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")
torch.set_num_threads(1)  # the suite runs in two processes


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return MODEL


@pytest.fixture(scope="session")
def demo_plan() -> Plan:
    return ace_moe.build_plan(MODEL, PAPER)


@pytest.fixture(scope="session")
def demo_model() -> PreTrainedModel:
    """Shared: a test that leaves it changed breaks the next one, which is the point."""
    return load_model(MODEL, device="cpu")


@pytest.fixture(scope="session")
def demo_windows(demo_model: PreTrainedModel) -> Windows:
    """Four windows of 256 tokens."""
    return load_windows(demo_model, load_tokenizer(MODEL), TEXT, 256, 1024)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message=".*falling back.*")
