"""What those who run the service see: probes, metrics, the OpenAPI page, pressure."""
