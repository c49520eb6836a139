-- put_objects: records the worker of each object of a tenant. Once the tenant has more newer objects than its share of `most`,
-- they become the older ones, so at most twice as many are kept. The tenants that made an object within the time limit have
-- equal shares.
--
-- KEYS 1 newer objects   HASH  object id -> worker id
--      2 older objects   HASH  object id -> worker id
--      3 tenants         ZSET  tenant -> seconds at which it last made an object
-- ARGV 1 most
--      2 seconds to keep them after the last change
--      3 tenant
--      4... object id, worker id...
-- returns an empty list
local MOST_PUT = 512 -- objects in one call
local LEAST_PART = 500 -- objects
local MOST_FORGOTTEN = 64 -- tenants in one call

register('kvatlas_fleet_put_objects', function(keys, args)
  local newer, older, tenants = keys[1], keys[2], keys[3]
  local most, keep_s, now_s = integer(args[1], 0), integer(args[2], 1), math.floor(now_ms() / 1000)
  if #args > 3 + 2 * MOST_PUT then
    error({ err = 'ERR arguments: expected at most 512 objects' })
  end
  for i = 4, #args, 2 do
    redis.call('HSET', newer, args[i], args[i + 1])
  end
  redis.call('EXPIRE', newer, keep_s)
  redis.call('ZADD', tenants, now_s, args[3])
  redis.call('EXPIRE', tenants, keep_s)
  local silent = redis.call('ZRANGEBYSCORE', tenants, '-inf', now_s - keep_s, 'LIMIT', 0, MOST_FORGOTTEN)
  if #silent > 0 then
    redis.call('ZREM', tenants, unpack(silent))
  end
  local part = math.max(math.min(most, LEAST_PART), math.floor(most / redis.call('ZCARD', tenants)))
  if redis.call('HLEN', newer) > part then
    redis.call('RENAME', newer, older)
  end
  return {}
end)
