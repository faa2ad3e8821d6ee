"""Manifests are valid without a cluster, belong together, and ask for what the services have."""

import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from executor_svc.settings import ExecutorSettings
from scheduler_svc.api.health import LIVE, READY
from scheduler_svc.settings import SchedulerSettings
from tests.deploy.manifests import KUBERNETES, ROOT, USER, Manifest, commands, documents, kubernetes_documents
from tests.processes import cleaned_up, free_port, start_scheduler

VERSION = kubernetes_validate.latest_version()
ALL = kubernetes_documents()
WORKLOADS = [document for document in ALL if document["kind"] in ("Deployment", "StatefulSet")]


def title(document: Manifest) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def pod(workload: Manifest) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def containers(workload: Manifest) -> list[dict[str, Any]]:
    return pod(workload)["containers"] + pod(workload).get("initContainers", [])


def labels(name: str) -> dict[str, str]:
    """Of the pods of a workload."""
    (found,) = (
        work["spec"]["template"]["metadata"]["labels"] for work in WORKLOADS if work["metadata"]["name"] == name
    )
    return dict(found)


@pytest.mark.parametrize("document", ALL, ids=title)
def test_every_manifest_follows_its_schema(document: Manifest) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


def test_a_field_that_there_is_not_would_be_found() -> None:
    bad = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a"}, "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(bad, VERSION, strict=True)


def test_every_file_belongs_to_a_kustomization() -> None:
    named = set()
    for file in KUBERNETES.rglob("kustomization.yaml"):
        (kustomization,) = documents(file)
        named |= {(file.parent / name).resolve() for name in kustomization["resources"]}
    files = {file.resolve() for file in KUBERNETES.rglob("*.yaml") if file.name != "kustomization.yaml"}
    assert named == files | {KUBERNETES.resolve()}


def test_selectors_find_pods() -> None:
    everyone = [labels(work["metadata"]["name"]).items() for work in WORKLOADS]
    for document in ALL:
        spec = document["spec"]
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is not None:
            wanted = selector.get("matchLabels", selector).items()
            assert any(wanted <= pods for pods in everyone), title(document)


@pytest.mark.parametrize("workload", WORKLOADS, ids=title)
def test_pods_meet_the_restricted_standard(workload: Manifest) -> None:
    security = pod(workload)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert (security["runAsUser"], security["fsGroup"]) == (USER, USER)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(workload)["automountServiceAccountToken"] is False
    for container in containers(workload):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=title)
def test_volumes_and_commands_are_there(workload: Manifest) -> None:
    made = {volume["name"] for volume in pod(workload)["volumes"]}
    made |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
    for container in containers(workload):
        assert {mount["name"] for mount in container["volumeMounts"]} <= made
        assert set(container.get("command", [])[:1]) <= commands()


def test_services_have_settings_that_they_start_with() -> None:
    scheduler, executor = (_workload(name) for name in ("scheduler", "executor"))
    settings = SchedulerSettings(**_settings(scheduler, "PAGED_SCHEDULER_"), _cli_parse_args=False)  # type: ignore[call-arg]
    lends = ExecutorSettings(model="a model", **_settings(executor, "PAGED_EXECUTOR_"))
    assert pod(scheduler)["terminationGracePeriodSeconds"] > settings.shutdown_grace_s
    assert pod(executor)["terminationGracePeriodSeconds"] > lends.shutdown_grace_s
    assert settings.executor_endpoint == f"tcp://executor:{lends.endpoint.rpartition(':')[2]}"
    assert {port["containerPort"] for port in containers(scheduler)[0]["ports"]} == {
        int(address.rpartition(":")[2]) for address in (settings.listen_address, settings.metrics_address or "")
    }


def test_probes_ask_for_health_that_there_is() -> None:
    scheduler = containers(_workload("scheduler"))[0]
    assert scheduler["livenessProbe"]["grpc"]["service"] == scheduler["startupProbe"]["grpc"]["service"] == LIVE
    assert scheduler["readinessProbe"]["grpc"]["service"] == READY


def test_the_autoscaler_goes_by_a_metric_that_there_is(tmp_path: Path) -> None:
    (rule,) = documents(ROOT / "deploy" / "prometheus" / "adapter.yaml")[0]["rules"]["custom"]
    (scaler,) = (document for document in ALL if document["kind"] == "HorizontalPodAutoscaler")
    own = [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"] if metric["type"] == "Pods"]
    assert own == [rule["name"]["as"]]
    assert f"\n{rule['seriesQuery'].partition('{')[0]} " in _metrics_of_a_scheduler(tmp_path)


def _metrics_of_a_scheduler(directory: Path) -> str:
    address = f"127.0.0.1:{free_port()}"
    with cleaned_up([start_scheduler(directory, "tcp://127.0.0.1:1", "--metrics-address", address)]) as services:
        services[0].wait_until_ready()
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            text: str = answer.read().decode()
            return text


def _workload(name: str) -> Manifest:
    (found,) = (work for work in WORKLOADS if work["metadata"]["name"] == name)
    return found


def _settings(workload: Manifest, prefix: str) -> dict[str, Any]:
    found = {entry["name"]: entry["value"] for entry in containers(workload)[0]["env"]}
    assert all(name.startswith(prefix) for name in found), found
    return {name.removeprefix(prefix).lower(): value for name, value in found.items()}
