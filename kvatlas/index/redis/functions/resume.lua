-- resume: where the marked holders that `kvatlas_overlap` left out can resume a chain.
--
-- KEYS 1 marked
--      2 marks of the scope
-- ARGV 1 packed hashes, the overlap's
--      2 index of the first hash in its chain, a multiple of SEGMENT
--      3 the highest position to resume at, in blocks from the chain's start
--      4 3-byte number and index (u32 BE) of each holder: its marks below that index count. Only the first HOLDERS are
--        looked at
-- returns {reach, left}, as `kvatlas_overlap` does
register_read_only('kvatlas_resume', function(keys, args)
  local holders, names, belows = args[4], {}, {}
  for at = 1, math.min(#holders, 7 * HOLDERS), 7 do
    names[#names + 1] = string.sub(holders, at, at + 2)
    belows[#belows + 1] = struct.unpack('>I4', holders, at + 3)
  end
  local reach, left = resume(keys[1], keys[2], args[1], integer(args[2], 0), integer(args[3], 0), names, belows)
  return { reach, left .. string.sub(holders, 7 * HOLDERS + 1) }
end, 4, MOST_CHAIN)
