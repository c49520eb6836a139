-- Routers' leases: a router's reservations count only while it renews its lease.

-- Ends a router's lease. `purge` then removes the reservations that were made under it.
local function end_lease(keys, router)
  local number = redis.call('HGET', keys[ROUTERS], router)
  if number then
    redis.call('HDEL', keys[ROUTERS], router)
    redis.call('ZADD', keys[DEADLINES], 0, 'o' .. router .. '\0' .. number)
  end
  redis.call('ZREM', keys[DEADLINES], 'l' .. router)
end

-- Renews a router's lease, or begins one. Returns the owner of the router's reservations, and whether it had a lease that had
-- not expired yet.
local function renew_lease(keys, router, lease_us, now)
  local ends, number = redis.call('ZSCORE', keys[DEADLINES], 'l' .. router), redis.call('HGET', keys[ROUTERS], router)
  local lived = ends and tonumber(ends) > now and number
  if not lived then
    end_lease(keys, router)
    number = next_number(keys)
    redis.call('HSET', keys[ROUTERS], router, number)
  end
  redis.call('ZADD', keys[DEADLINES], string.format('%d', now + lease_us), 'l' .. router)
  return router .. '\0' .. number, lived
end
