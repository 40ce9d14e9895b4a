"""The HTTP service: both planes on one application."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from registry_service.api import control_registry, control_serving, data_plane
from registry_service.api.front import Front
from registry_service.api.problems import problems_install
from registry_service.usecases.context import Context


def service_build(context: Context) -> FastAPI:
    """An application that serves ``/v1`` (control plane) and ``/v2`` (data plane)."""
    app = FastAPI(
        title="Adapter Registry",
        version=version("adapter-registry"),
        summary="Admits LoRA adapters, and resolves names to admitted digests.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
    )
    app.state.context = context
    app.add_middleware(Front, context=context)
    app.include_router(control_serving.router)
    app.include_router(control_registry.router)
    app.include_router(data_plane.router, include_in_schema=False)
    problems_install(app)
    return app
