"""Engines that are not followed over ZMQ. Each class has the methods of `kvatlas_publishers.sidecar.EngineSidecar`."""
