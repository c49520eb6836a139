-- claim: takes or renews those of these leases that are free, expired or the member's own. A lease of another member that would
-- outlast one taken now dates from before the store's clock went back, and is shortened to the same end.
--
-- KEYS 1 leases
-- ARGV 1 member id
--      2 ttl ms
--      3... partitions
-- returns the partitions whose leases the member holds now
register('kvatlas_fleet_claim', function(keys, args)
  local leases, member, ttl_ms, now, held = keys[1], args[1], integer(args[2], 0), now_ms(), {}
  local last = now + ttl_ms
  local mine = string.format(LEASE, last, member)
  for i = 3, #args do
    local partition = args[i]
    local holder, expiry = holder_of(redis.call('HGET', leases, partition), now)
    if holder == nil or holder == member then
      redis.call('HSET', leases, partition, mine)
      held[#held + 1] = partition
    elseif expiry > last then
      redis.call('HSET', leases, partition, string.format(LEASE, last, holder))
    end
  end
  return held
end)
