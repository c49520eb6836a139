-- release: frees the numbers that are retired and have no blocks any more.
--
-- KEYS 1 holders
--      2 retired
--      3 digests
--      4 touched
--      5 free
-- ARGV 1 proven: 1 if one server's whole scan found no entry of these numbers. A count that is not zero is then itself wrong
--        (damage that no message did), unless the number was freed and given out again meanwhile.
--      2... for each number: it, and its entry in holders as it was before the scan
-- returns how many retired holders are left
register_always('kvatlas_release', function(keys, args)
  local holders, retired, digests, touched, free = unpack(keys)
  local proven, now = args[1] == '1', now_ms()
  for i = 2, #args, 2 do
    local holder, entry_before = args[i], args[i + 1]
    local scanned = proven and (redis.call('HGET', holders, holder) or '') == entry_before
    local empty = scanned or digest_blocks(read_digest(digests, holder)) == 0
    if empty and redis.call('SISMEMBER', retired, holder) == 1 then
      redis.call('SREM', retired, holder)
      redis.call('HDEL', holders, holder)
      redis.call('HDEL', digests, holder)
      redis.call('HDEL', touched, holder)
      redis.call('RPUSH', free, holder .. string.format('%d', now))
    end
  end
  return redis.call('SCARD', retired)
end)
