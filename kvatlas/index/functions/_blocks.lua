-- Changing many blocks of one scope for one holder: one HMGET, one HSET, one HDEL for thousands of blocks.
-- Values repeat, so what becomes of a value is computed once (`known`), and Lua only looks it up a block.

-- The side index: which blocks follow which. side = {children = key, parents = key}.
local function link(side, hash, parent)
  if redis.call('HSETNX', side.parents, hash, parent) == 1 then
    redis.call('HSET', side.children, parent, (redis.call('HGET', side.children, parent) or '') .. hash)
  end
end

local function unlink(side, hash)
  local parent = redis.call('HGET', side.parents, hash)
  if not parent then
    return
  end
  redis.call('HDEL', side.parents, hash)
  local rest = {}
  for _, child in ipairs(split(redis.call('HGET', side.children, parent) or '')) do
    if child ~= hash then
      rest[#rest + 1] = child
    end
  end
  if #rest == 0 then
    redis.call('HDEL', side.children, parent)
  else
    redis.call('HSET', side.children, parent, table.concat(rest))
  end
end

local function value_with(value, holder, tier_bit, flags)
  if not value then
    return holder .. string.char(bit.bor(tier_bit, flags)), true
  end
  local at, slot = find_entry(value, holder)
  if not at then
    return string.sub(value, 1, slot - 1) .. holder .. string.char(bit.bor(tier_bit, flags)) .. string.sub(value, slot), true
  end
  local old = string.byte(value, at + 3)
  local new = bit.bor(old, tier_bit, flags)
  if new == old then
    return value, false
  end
  return string.sub(value, 1, at + 2) .. string.char(new) .. string.sub(value, at + 4), bit.band(old, tier_bit) == 0
end

local function value_without(value, holder, tier_bit)
  if not value then
    return value, false
  end
  local at = find_entry(value, holder)
  if not at then
    return value, false
  end
  local old = string.byte(value, at + 3)
  if bit.band(old, tier_bit) == 0 then
    return value, false
  end
  local new = old - tier_bit
  if bit.band(new, TIER_MASK) == 0 then
    local rest = string.sub(value, 1, at - 1) .. string.sub(value, at + 4)
    return rest ~= '' and rest, true
  end
  return string.sub(value, 1, at + 2) .. string.char(new) .. string.sub(value, at + 4), true
end

-- The two 32-bit sums of packed hashes' halves (exact: a run of hashes is far below 2^21 blocks).
local sum_formats = {}
local function sums(packed)
  local low, high, count = 0, 0, #packed / 8
  for first = 0, count - 1, 1024 do
    local n = math.min(count - first, 1024)
    local format = sum_formats[n]
    if not format then
      format = '<' .. string.rep('I4', 2 * n)
      if n <= 64 or n == 1024 then
        sum_formats[n] = format
      end
    end
    local halves = { struct.unpack(format, packed, first * 8 + 1) }
    for i = 1, 2 * n, 2 do
      low = low + halves[i]
      high = high + halves[i + 1]
    end
  end
  return low, high
end

-- Counts blocks of one scope, given by how many they are and their sums, into (sign 1) or out of (sign -1) a holder's digest,
-- under a tier or a flag (by its bit): see kvatlas/digest.py.
local function count_sums(digest, tier, count, low, high, scope, sign)
  local at = 3 * tier + 1
  digest[at] = digest[at] + sign * count
  digest[at + 1] = (digest[at + 1] + sign * (low % TWO32 * scope.mix_low % TWO32)) % TWO32
  digest[at + 2] = (digest[at + 2] + sign * (high % TWO32 * scope.mix_high % TWO32)) % TWO32
end

-- The same for packed blocks.
local function count_blocks(digest, tier, packed, scope, sign)
  local low, high = sums(packed)
  count_sums(digest, tier, #packed / 8, low, high, scope, sign)
end

-- Which flags besides the tiers differ between a holder's entries in two values?
local function flags_changed(old, new, holder)
  local was, is = old and find_entry(old, holder), new and find_entry(new, holder)
  return bit.band(bit.bxor(was and string.byte(old, was + 3) or 0, is and string.byte(new, is + 3) or 0), FLAG_MASK)
end

-- flagged: {bit of a flag -> {hash...}}; the hash's entry has these flags now, or has them no longer.
local function note_flags(flagged, flags, hash)
  for flag = 5, 7 do
    if bit.band(flags, 2 ^ flag) ~= 0 then
      flagged[flag] = flagged[flag] or {}
      table.insert(flagged[flag], hash)
    end
  end
end

-- The hashes each once.
local function distinct(hashes)
  local seen, out, n = {}, {}, 0
  for i = 1, #hashes do
    if not seen[hashes[i]] then
      seen[hashes[i]] = true
      n = n + 1
      out[n] = hashes[i]
    end
  end
  return out
end

-- Stores or removes packed blocks, of which apply_call.py gives the sums; returns how many changed and the bytes written.
-- `several`: they are of several events, which may repeat each other; one event repeats nothing.
-- op: {scope, holder, tier, flags, store = true or false, digest}; scope: {blocks = key, mix_low, mix_high, side or nil}
local function change_blocks(op, packed, low, high, several)
  local hashes = split(packed)
  local all = #hashes
  if several then
    hashes = distinct(hashes)
  end
  local holder, store, flags, tier_bit = op.holder, op.store, op.flags, 2 ^ op.tier
  local blocks, side = op.scope.blocks, op.scope.side
  local known_new, known_changed, known_flags = {}, {}, {}
  local changed, c, bytes = {}, 0, 0
  local flagged = #op.digest > DIGEST_WORDS and {} -- few holders were ever told of flags
  for first = 1, #hashes, CHUNK do
    local last = math.min(first + CHUNK - 1, #hashes)
    local values = redis.call('HMGET', blocks, unpack(hashes, first, last))
    local set, gone, n, m = {}, {}, 0, 0
    for i = first, last do
      local hash = hashes[i]
      local value = values[i - first + 1]
      local new = known_new[value]
      if new == nil then
        if store then
          new, known_changed[value] = value_with(value, holder, tier_bit, flags)
        else
          new, known_changed[value] = value_without(value, holder, tier_bit)
        end
        known_new[value] = new
        known_flags[value] = flagged and flags_changed(value, new, holder)
      end
      if new ~= value then
        if new then
          set[n + 1], set[n + 2] = hash, new
          n = n + 2
          bytes = bytes + 8 + #new
        else
          m = m + 1
          gone[m] = hash
        end
      end
      if flagged and known_flags[value] ~= 0 then
        note_flags(flagged, known_flags[value], hash)
      end
      if known_changed[value] then
        c = c + 1
        changed[c] = hash
      end
    end
    if n > 0 then
      redis.call('HSET', blocks, unpack(set, 1, n))
    end
    if m > 0 then
      redis.call('HDEL', blocks, unpack(gone, 1, m))
      if side then
        for i = 1, m do
          unlink(side, gone[i])
        end
      end
    end
  end
  if c == all then
    count_sums(op.digest, op.tier, c, low, high, op.scope, store and 1 or -1)
  elseif c > 0 then
    count_blocks(op.digest, op.tier, table.concat(changed), op.scope, store and 1 or -1)
  end
  for flag, those in pairs(flagged or {}) do
    count_blocks(op.digest, flag, table.concat(those), op.scope, store and 1 or -1)
  end
  return c, bytes
end
