-- put_objects: records the worker of each object. Once there are more than `most` newer objects, they become the older
-- ones, so at most twice as many are kept.
--
-- KEYS 1 newer objects   HASH  object id -> worker id
--      2 older objects   HASH  object id -> worker id
-- ARGV 1 most
--      2 seconds to keep them after the last change
--      3... object id, worker id...
-- returns an empty list
local MOST_PUT = 512 -- objects of one call

register('kvatlas_fleet_put_objects', function(keys, args)
  local newer, older = keys[1], keys[2]
  if #args > 2 + 2 * MOST_PUT then
    error({ err = 'ERR arguments: expected at most 512 objects' })
  end
  for i = 3, #args, 2 do
    redis.call('HSET', newer, args[i], args[i + 1])
  end
  redis.call('EXPIRE', newer, args[2])
  if redis.call('HLEN', newer) > integer(args[1], 0) then
    redis.call('RENAME', newer, older)
  end
  return {}
end)
