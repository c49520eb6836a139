"""Engines that are not followed over ZMQ: each with the methods of `publishers.sidecar.EngineSidecar`."""
