-- untouch: removes scopes from a holder's list of the scopes that it used, if they have no blocks and no marks in this shard: a
-- sweep has nothing to do there.
--
-- KEYS 1 touched
--      2 held
--      3 holders
--      4 moments
--      5 spent
--      6... blocks and marks of each scope that is removed
-- ARGV 1 holder
--      2 its list as it was read
--      3 the list without these scopes
-- returns 1; 0 if the list has changed, or one of the scopes has blocks or marks
register_always('kvatlas_untouch', function(keys, args)
  local touched, holder, before, rest = keys[1], args[1], args[2], args[3]
  if redis.call('HGET', touched, holder) ~= before then
    return 0
  end
  for i = 6, #keys do
    if redis.call('EXISTS', keys[i]) == 1 then
      return 0
    end
  end
  local k = { touched = touched, held = keys[2], holders = keys[3], moments = keys[4], spent = keys[5] }
  local gone, kept = {}, sizes_of(rest)
  for scope_id in pairs(sizes_of(before)) do
    gone[#gone + 1] = #scope_id == 8 and not kept[scope_id] and scope_id or nil
  end
  settle_usage(k, { holder }, gone)
  if rest == '' then
    redis.call('HDEL', touched, holder)
  else
    redis.call('HSET', touched, holder, rest)
  end
  return 1
end, 3, MOST_LIST)
