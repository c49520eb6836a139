-- untouch: removes scopes from a holder's list of the scopes that it used, if they have no blocks and no marks in this shard,
-- because a sweep has nothing to do there.
--
-- KEYS 1 touched
--      2 held
--      3 holders
--      4 moments
--      5 spent
--      6... blocks and marks of each scope that is removed
-- ARGV 1 holder
--      2 ids of these scopes, packed
-- returns 1; 0 if one of the scopes has blocks or marks
register_always('kvatlas_untouch', function(keys, args)
  local touched, holder, gone = keys[1], args[1], split(args[2])
  for i = 6, #keys do
    if redis.call('EXISTS', keys[i]) == 1 then
      return 0
    end
  end
  local k = { touched = touched, held = keys[2], holders = keys[3], moments = keys[4], spent = keys[5] }
  settle_usage(k, { holder }, gone)
  local is_gone, before, kept = {}, redis.call('HGET', touched, holder) or '', {}
  for _, scope_id in ipairs(gone) do
    is_gone[scope_id] = true
  end
  for at = 1, #before, 16 do
    if not is_gone[string.sub(before, at, at + 7)] then
      kept[#kept + 1] = string.sub(before, at, at + 15)
    end
  end
  if #kept == 0 then
    redis.call('HDEL', touched, holder)
  else
    redis.call('HSET', touched, holder, table.concat(kept))
  end
  return 1
end, 2)
