-- used: adds the usage of a router's answers to the pool's totals. A report that arrives twice is added once.
--
-- KEYS 1 usage         HASH  who used it (packed) -> "<answers> <prompt tokens> <cached tokens> <us saved>"
--      2 usage reports HASH  router id -> number of its last report
-- ARGV 1 router id
--      2 number of the report
--      3 most users; what others use is counted under ''
--      4 user, answers, prompt tokens, cached tokens, us saved; and so on
-- returns 1; 0 if it was added before
local MOST_ROUTERS = 4096

register('kvatlas_pool_used', function(keys, args)
  local usage, reports, router = keys[1], keys[2], args[1]
  local number, most = integer(args[2], 0), integer(args[3], 0)
  if number <= (tonumber(redis.call('HGET', reports, router)) or -1) then
    return 0
  end
  if redis.call('HLEN', reports) >= MOST_ROUTERS then -- each start of a router has a name of its own
    redis.call('UNLINK', reports)
  end
  redis.call('HSET', reports, router, string.format('%d', number))
  local users = redis.call('HLEN', usage)
  for i = 4, #args, 5 do
    local user = args[i]
    local stored = redis.call('HGET', usage, user)
    if not stored and users >= most then
      user = ''
      stored = redis.call('HGET', usage, user)
    end
    users = users + (stored and 0 or 1)
    local totals, at = {}, 0
    for total in string.gmatch(stored or '0 0 0 0', '%d+') do
      at = at + 1
      totals[at] = string.format('%.0f', tonumber(total) + integer(args[i + at], 0))
    end
    redis.call('HSET', usage, user, table.concat(totals, ' '))
  end
  return 1
end, 1024)
