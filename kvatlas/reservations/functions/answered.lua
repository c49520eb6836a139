-- answered: keeps one router's counts of answers for a while. If there are too many routers, the one whose counts would expire
-- first is dropped. The counts are read with HGETALL (kvatlas/predictions/store.py).
--
-- KEYS 1 answers   HASH  router id -> "<us at which it ends> <packed report>"
-- ARGV 1 router id
--      2 us for which it is kept
--      3 most routers
--      4 packed report
-- returns 0
local MOST_ANSWERED, MOST_ANSWER = 256, 16384 -- routers, and bytes in the report of one of them

register('kvatlas_pool_answered', function(keys, args)
  local answers, router, report = keys[1], args[1], args[4]
  local keep_us, most = integer(args[2], 0), integer(args[3], 0, MOST_ANSWERED)
  local now = now_us()
  redis.call('HSET', answers, router, string.format('%d ', now + keep_us) .. report)
  redis.call('PEXPIRE', answers, string.format('%d', math.ceil(keep_us / 1000)))
  local live, first, first_ends, flat = 0, nil, math.huge, read_whole(answers, MOST_ANSWERED + 1)
  for i = 1, #flat, 2 do
    local other, ends = flat[i], tonumber(string.match(flat[i + 1], '^%d+')) or 0 -- 0: it is damaged
    if ends <= now then
      redis.call('HDEL', answers, other)
    else
      live = live + 1
      if ends < first_ends then
        first, first_ends = other, ends
      end
    end
  end
  if live > most then
    redis.call('HDEL', answers, first)
  end
  return 0
end, 4, MOST_ANSWER)
