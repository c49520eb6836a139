-- release: frees swept numbers, which no block or mark in any scope that they touched still has. The
-- result of a sweep holds only on the server on which all of it ran (not after a failover), and only for numbers that were
-- not freed and given out again in the meantime. If the digest of such a holder is not 0, the digest itself is damaged.
--
-- KEYS 1 holders
--      2 retired
--      3 digests
--      4 touched
--      5 free
--      6 marked
--      7 pinned
--      8... pinned blocks of each number
-- ARGV 1 server that the whole sweep ran on
--      2... for each number: it, and its entry in holders as it was before the sweep
-- returns how many retired holders are left
local PINNED_KEYS = 7 -- before them

register_always('kvatlas_release', function(keys, args)
  local holders, retired, digests, touched, free, marked, pinned = unpack(keys)
  local server, now = args[1], now_ms()
  if server == server_id() then
    for i = 2, #args, 2 do
      local holder, entry_before = args[i], args[i + 1]
      if (redis.call('HGET', holders, holder) or '') == entry_before then
        redis.call('SREM', retired, holder)
        redis.call('HDEL', holders, holder)
        redis.call('HDEL', digests, holder)
        redis.call('HDEL', touched, holder)
        redis.call('HDEL', marked, holder)
        redis.call('SREM', pinned, holder)
        redis.call('UNLINK', keys[PINNED_KEYS + i / 2])
        redis.call('RPUSH', free, holder .. string.format('%d', now))
      end
    end
  end
  return redis.call('SCARD', retired)
end)
