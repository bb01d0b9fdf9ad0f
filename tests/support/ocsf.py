"""What OCSF 1.2 requires of the events that the audit log has, written down from its schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BASE = {
    "activity_id": int, "category_uid": int, "class_uid": int, "type_uid": int, "severity_id": int, "time": int,
    "metadata": dict, "message": str, "status_id": int, "status": str,
}  # fmt: skip
_CLASSES: Mapping[int, tuple[frozenset[int], Mapping[str, type]]] = {
    0: (frozenset({99}), {}),
    3002: (frozenset({1, 2}), {"user": dict, "src_endpoint": dict, "service": dict, "dst_endpoint": dict}),
    6003: (frozenset({1, 2, 3, 4, 99}), {"actor": dict, "api": dict, "src_endpoint": dict, "resources": list}),
}
_STATUS = {0: "Unknown", 1: "Success", 2: "Failure"}
_REPEATED = {"count", "start_time", "end_time", "duration"}


def problems(event: Mapping[str, Any]) -> list[str]:
    """What is wrong with an event; empty where nothing is."""
    activities, required = _CLASSES[event["class_uid"]]
    found = [
        f"{name} is {event.get(name)!r}"
        for name, kind in {**_BASE, **required}.items()
        if not isinstance(event.get(name), kind) or isinstance(event.get(name), bool)
    ]
    if found:
        return found
    if event["activity_id"] not in activities:
        found.append(f"activity {event['activity_id']}")
    if event["activity_id"] == 99 and not event.get("activity_name"):
        found.append("an activity that is another needs its name")
    if event["type_uid"] != event["class_uid"] * 100 + event["activity_id"]:
        found.append(f"type_uid {event['type_uid']}")
    if event["category_uid"] != event["class_uid"] // 1000:
        found.append(f"category_uid {event['category_uid']}")
    if event["time"] < 10**12:
        found.append("time is not in milliseconds")
    if _STATUS.get(event["status_id"], event["status"]) != event["status"]:
        found.append(f"status {event['status']} is not {event['status_id']}")
    metadata = event["metadata"]
    if not metadata.get("version") or not metadata.get("product", {}).get("vendor_name"):
        found.append(f"metadata {metadata}")
    repeated = _REPEATED & event.keys()
    if repeated not in (set(), _REPEATED):
        found.append(f"of the repetition only {repeated}")
    for user in (event.get("user"), event.get("actor", {}).get("user")):
        if user is not None and not isinstance(user.get("name"), str):
            found.append(f"user {user}")
    if event["class_uid"] == 6003:
        api = event["api"]
        if not api.get("operation") or not api.get("request", {}).get("uid") or not api.get("service", {}).get("name"):
            found.append(f"api {api}")
        if not isinstance(event.get("action_id"), int) or "security_control" not in metadata.get("profiles", ()):
            found.append("action_id belongs to the profile security_control")
        if "user" not in event["actor"]:
            found.append(f"actor {event['actor']}")
    for side in ("src_endpoint", "dst_endpoint"):
        if side in event and not event[side].get("ip") and not event[side].get("name"):
            found.append(f"{side} {event[side]}")
    return found
