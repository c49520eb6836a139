-- leases: all leases that have not expired.
--
-- KEYS 1 leases
-- returns {partition, member id...}
register('kvatlas_fleet_leases', function(keys)
  local leases, now, out = keys[1], now_ms(), {}
  local flat = redis.call('HGETALL', leases)
  for i = 1, #flat, 2 do
    local partition, member = flat[i], holder_of(flat[i + 1], now)
    if member then
      out[#out + 1] = partition
      out[#out + 1] = member
    end
  end
  return out
end)
