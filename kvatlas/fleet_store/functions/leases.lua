-- Leases of partitions.
--
-- leases   HASH  partition -> "<expiry ms> <member id>"

local LEASE = '%d %s'
local LEASE_PATTERN = '^(%d+) (.*)$'

-- Returns a lease's member and when it ends; nil if there is none, or it has expired.
local function holder_of(lease, now)
  if not lease then
    return nil
  end
  local expiry, member = string.match(lease, LEASE_PATTERN)
  if tonumber(expiry) <= now then
    return nil
  end
  return member, tonumber(expiry)
end

-- Is it this member's lease, expired or not?
local function is_lease_of(lease, member)
  local _, holder = string.match(lease, LEASE_PATTERN)
  return holder == member
end

-- claim: takes or renews the leases that are free, expired or the member's own. A lease that ends later than one taken now is
-- from before the store's clock went back, and is cut to that.
--
-- KEYS 1 leases
-- ARGV 1 member id
--      2 ttl ms
--      3... partitions
-- returns the partitions that the member holds now
register('kvatlas_fleet_claim', function(keys, args)
  local leases, member, ttl_ms, now, held = keys[1], args[1], tonumber(args[2]), now_ms(), {}
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

-- release: gives up the member's own leases among these.
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

-- leases: all that have not expired.
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
