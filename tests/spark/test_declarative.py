"""Spark's Declarative Pipelines: the example runs as it stands, with the source and the sink by their format name."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest

from millrace.testing import Cluster
from support.topic_contents import contents
from support.topics import Sent, Topics

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "declarative"
NEEDED = ("grpc", "grpc_status", "google.rpc", "yaml", "zstandard")


def missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


@pytest.mark.cluster
@pytest.mark.timeout(300)  # processes of its own, each with a JVM: slow on a busy machine
@pytest.mark.skipif(any(map(missing, NEEDED)), reason="needs pip install 'pyspark[pipelines]'")
def test_the_example_reads_a_topic_into_a_table_and_writes_another_topic(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text()
    assert "file:///tmp/millrace-declarative/storage" in text
    spec.write_text(text.replace("file:///tmp/millrace-declarative/storage", (tmp_path / "storage").as_uri()))
    with Cluster() as cluster:
        topics = Topics(cluster.bootstrap_servers)
        topics.create("web-orders", 2, exact=True)
        topics.create("large-web-orders", exact=True)
        orders = [{"id": f"o{number}", "amount": number * 25.0} for number in range(10)]
        topics.send("web-orders", [Sent(json.dumps(order).encode()) for order in orders])
        done = subprocess.run(
            [
                str(Path(pyspark.__file__).parent / "bin" / "spark-pipelines"),
                "run",
                *("--spec", str(spec)),
                *("--conf", "spark.ui.enabled=false"),
                *("--conf", "spark.driver.memory=700m"),
                *("--conf", f"spark.sql.warehouse.dir={tmp_path / 'warehouse'}"),
            ],
            env={**os.environ, "MILLRACE_BOOTSTRAP": cluster.bootstrap_servers, "PYSPARK_PYTHON": sys.executable},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        large = contents(cluster.bootstrap_servers, "large-web-orders")
    assert sorted((one.key, json.loads(one.value or "")) for one in large) == [
        (order["id"], order) for order in orders[4:]
    ]
    table = pq.read_table(tmp_path / "warehouse" / "orders").to_pylist()
    assert sorted((row["id"], row["amount"]) for row in table) == [(one["id"], one["amount"]) for one in orders]
