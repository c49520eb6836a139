-- untouch: takes scopes without blocks in this shard out of the holders' lists of the scopes that they used, some holders a
-- call: a sweep has nothing to do there.
--
-- KEYS 1 touched
--      2... blocks of each scope
-- ARGV 1 cursor
--      2 count
--      3... scope ids
-- returns {next cursor, scope ids with blocks...}
register_always('kvatlas_untouch', function(keys, args)
  local touched, cursor, count = keys[1], args[1], args[2]
  local empty, any_empty, held = {}, false, {}
  for i = 3, #args do
    local scope_id, blocks = args[i], keys[i - 1]
    if redis.call('EXISTS', blocks) == 1 then
      held[#held + 1] = scope_id
    else
      empty[scope_id] = true
      any_empty = true
    end
  end
  if not any_empty then
    return { '0', unpack(held) }
  end
  local next_cursor, flat = unpack(redis.call('HSCAN', touched, cursor, 'COUNT', count))
  for i = 1, #flat, 2 do
    local holder, uses, rest = flat[i], flat[i + 1], {}
    for at = 1, #uses, 16 do
      if not empty[string.sub(uses, at, at + 7)] then
        rest[#rest + 1] = string.sub(uses, at, at + 15)
      end
    end
    if #rest == 0 then
      redis.call('HDEL', touched, holder)
    elseif #rest * 16 ~= #uses then
      redis.call('HSET', touched, holder, table.concat(rest))
    end
  end
  return { next_cursor, unpack(held) }
end)
