"""Engines that are not followed over ZMQ: each with the methods of `kvatlas_publishers.sidecar.EngineSidecar`."""
