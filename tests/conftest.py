"""Shared fixtures and the hypothesis profiles.

``ci`` (the default) is quick and derandomised; ``heavy`` searches longer: ``HYPOTHESIS_PROFILE=heavy pytest -m full``.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("ci", max_examples=25, deadline=None, derandomize=True, suppress_health_check=_QUIET)
settings.register_profile("heavy", max_examples=400, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

SAMPLE_SEED = int(os.environ.get("GRAPHSURGERY_SAMPLE_SEED", "20261130"))
"""Seed of the sample of fixtures and modes that the default run takes; printed in the header."""


def pytest_report_header() -> str:
    return f"sample seed: {SAMPLE_SEED} (GRAPHSURGERY_SAMPLE_SEED); hypothesis profile: {os.environ.get('HYPOTHESIS_PROFILE', 'ci')}"


@pytest.fixture
def sample_random() -> random.Random:
    """A generator seeded with the sample seed."""
    return random.Random(SAMPLE_SEED)


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The committed exports."""
    return Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="session")
def cases_dir() -> Path:
    """Small models that break surgery tools, with inputs and reference outputs."""
    return Path(__file__).parent / "cases"
