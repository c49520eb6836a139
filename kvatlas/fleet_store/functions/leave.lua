-- leave: removes the member and all its leases.
--
-- KEYS 1 members
--      2 leases
-- ARGV 1 member id
-- returns {}
register('kvatlas_fleet_leave', function(keys, args)
  local members, leases, member = keys[1], keys[2], args[1]
  redis.call('HDEL', members, member)
  local flat = redis.call('HGETALL', leases)
  for i = 1, #flat, 2 do
    local partition, lease = flat[i], flat[i + 1]
    if is_lease_of(lease, member) then
      redis.call('HDEL', leases, partition)
    end
  end
  return {}
end)
