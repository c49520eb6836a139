-- scopes_forget: deletes these scopes unless they have been registered in the meantime.
--
-- KEYS 1 scopes
--      2 scope uses
-- ARGV 1 ms since which they must not have been registered
--      2... scope ids
-- returns how many it deleted
register_always('kvatlas_scopes_forget', function(keys, args)
  local scopes, uses, before, dropped = keys[1], keys[2], now_ms() - args[1], 0
  for i = 2, #args do
    local scope_id = args[i]
    local used = redis.call('ZSCORE', uses, scope_id)
    if used and tonumber(used) <= before then
      dropped = dropped + redis.call('HDEL', scopes, scope_id)
      redis.call('ZREM', uses, scope_id)
    end
  end
  return dropped
end)
