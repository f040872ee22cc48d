"""The view of those who run the service: probes, metrics, the OpenAPI page, pressure."""
