"""The types of the HTTP API: what requests hold and what answers hold. Frontends, the OpenAPI document and the client
share them. Nothing here imports anything of the package.
"""
