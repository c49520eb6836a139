-- usage: reads the byte-ms of a holder since it became active, by scope and tier.
--
-- KEYS 1 holders
--      2 held
--      3 moments
--      4 touched
-- ARGV 1 holder
--      2 how many of its entries in touched to skip
--      3 how many to read
-- returns {number of its entries, {scope id and tier (a byte), byte-ms as text...}}
register_read_only('kvatlas_usage', function(keys, args)
  local k, holder = { holders = keys[1], held = keys[2], moments = keys[3], touched = keys[4] }, args[1]
  local touched, first, most = redis.call('HGET', k.touched, holder) or '', integer(args[2], 0, 1e9), integer(args[3], 1, 512)
  local page = string.sub(touched, 16 * first + 1, 16 * (first + most + 4)) -- a scope has 5 entries at most
  local some, found = {}, {}
  for at = 1, math.min(#page, 16 * most), 16 do
    if string.byte(page, at + 8) == 0 then -- otherwise it is a further entry of a scope
      some[#some + 1] = string.sub(page, at, at + 7)
    end
  end
  local sizes = sizes_of(page)
  local block_ms = block_ms_of(k, { holder }, some)
  for i = 1, #block_ms, 2 do
    local place = string.sub(block_ms[i], 4)
    found[i], found[i + 1] = place, string.format('%.17g', block_ms[i + 1] * bytes_in(sizes, place))
  end
  return { math.floor(#touched / 16), found }
end, 3)
