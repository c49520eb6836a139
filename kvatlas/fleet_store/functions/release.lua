-- release: gives up those of the given leases that are the member's own.
--
-- KEYS 1 leases
-- ARGV 1 member id
--      2... partitions
-- returns {}
register('kvatlas_fleet_release', function(keys, args)
  local leases, member = keys[1], args[1]
  for i = 2, #args do
    local partition = args[i]
    local lease = redis.call('HGET', leases, partition)
    if lease and is_lease_of(lease, member) then
      redis.call('HDEL', leases, partition)
    end
  end
  return {}
end)
