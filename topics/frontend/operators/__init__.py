"""Routes and figures for operators: probes, metrics, the OpenAPI page, pressure."""
