-- look: evaluates offers without booking anything.
--
-- KEYS see _layout.lua
-- ARGV 1 ask, see _evaluation.lua
-- returns cmsgpack, see evaluate in _choice.lua; { -1 } if there are too few look-alikes. Error DAMAGED: see `mend`
register_read_only('kvatlas_pool_look', function(keys, args)
  local answer = evaluate(keys, unpack_ask(args[1]), now_us())
  return cmsgpack.pack(answer or { -1 })
end, 1, MOST_ASK)
