-- room: reads the memory of the server that holds this shard.
--
-- KEYS 1 meta
-- returns {bytes used, maxmemory (0: no limit), maxmemory-policy}
register_read_only('kvatlas_room', function()
  local info = redis.call('INFO', 'memory')
  return {
    tonumber(string.match(info, 'used_memory:(%d+)')), tonumber(string.match(info, 'maxmemory:(%d+)')),
    string.match(info, 'maxmemory_policy:([%w-]+)') or '',
  }
end)
