"""LiteLLM's Router, with kvatlas to choose its deployments."""
