-- look: evaluates offers and books nothing.
--
-- KEYS see _layout.lua
-- ARGV 1 ask, see _evaluation.lua
-- returns cmsgpack, see evaluate in _choice.lua; { -1 } if the ask's crowds have too few members
register_read_only('kvatlas_pool_look', function(keys, args)
  local answer = evaluate(keys, unpack_ask(args[1]), now_us())
  return cmsgpack.pack(answer or { -1 })
end)
