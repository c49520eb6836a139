"""What a request through `kvatlas router` costs, compared with other proxies for engines: CPU time, in turn, on pinned
cores."""
