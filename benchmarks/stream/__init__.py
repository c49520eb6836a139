"""From the publisher through the stream into the index: throughput."""
