"""The environment that a local Spark is started in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from millrace.spark.session import use_installed_pyspark


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_HOME", "")  # so that it is put back afterwards
    monkeypatch.delenv("SPARK_HOME")
    return monkeypatch


def test_workers_find_the_installed_package_and_no_archive_of_it(environment: pytest.MonkeyPatch) -> None:
    use_installed_pyspark()
    home = Path(os.environ["SPARK_HOME"])
    assert (home / "bin" / "spark-submit").exists()
    assert list((home / "jars").glob("spark-core_*.jar"))
    assert not (home / "python").exists()


def test_a_spark_or_a_python_of_the_users_own_is_left_alone(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PYSPARK_PYTHON", "/another/python")
    use_installed_pyspark()
    assert "SPARK_HOME" not in os.environ
    environment.setenv("PYSPARK_PYTHON", sys.executable)
    environment.setenv("SPARK_HOME", "/my/spark")
    use_installed_pyspark()
    assert os.environ["SPARK_HOME"] == "/my/spark"
