"""The first page: is the cluster well, and what goes through it."""

from __future__ import annotations

from starlette.responses import Response

from millrace.console.web import Page, page


@page("/")
def overview(page: Page) -> Response:
    with page.access.client() as client:
        topics = client.topics()
        brokers = client.broker_ids()
    return page.render("overview.html", topics=topics, brokers=brokers)
