-- look: evaluates offers and books nothing.
--
-- KEYS see _layout.lua
-- ARGV 1 ask, see _evaluation.lua
-- returns cmsgpack, see evaluate in _choice.lua; { -1 } if there are too few look-alikes. Error DAMAGED: see `mend`
register_read_only('kvatlas_pool_look', function(keys, args)
  local answer = evaluate(keys, unpack_ask(args[1]), now_us())
  return cmsgpack.pack(answer or { -1 })
end)

-- booked: which reservations there are. One that is over by now may still be among them.
--
-- KEYS see _layout.lua
-- ARGV ids
-- returns for each 1, or 0 if there is no such reservation
register_read_only('kvatlas_pool_booked', function(keys, args)
  local found = {}
  for i = 1, #args do
    found[i] = redis.call('HEXISTS', keys[RESERVATIONS], args[i])
  end
  return found
end)

-- mend: repairs a pool that a reader found damaged.
--
-- KEYS see _layout.lua
-- ARGV 1 what is damaged
-- returns 0
register('kvatlas_pool_mend', function(keys, args)
  repair(keys, args[1])
  return 0
end)
