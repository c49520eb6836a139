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

-- Stores or removes packed blocks; returns how many changed and the bytes written.
-- op: {blocks = key, holder, tier, flags, store = true or false, digest, scope_low, scope_high, side or nil}
local function change_blocks(op, packed)
  local hashes = split(packed)
  local tier_bit = 2 ^ op.tier
  local known_new, known_changed, seen = {}, {}, {}
  local changed_blocks, bytes = 0, 0
  local digest, at = op.digest, 3 * op.tier + 1
  local sum_low, sum_high = 0, 0
  local holder, store, flags, scope_low, scope_high = op.holder, op.store, op.flags, op.scope_low, op.scope_high
  local bxor, read = bit.bxor, struct.unpack
  for first = 1, #hashes, CHUNK do
    local last = math.min(first + CHUNK - 1, #hashes)
    local values = redis.call('HMGET', op.blocks, unpack(hashes, first, last))
    local set, gone, n, m = {}, {}, 0, 0
    for i = first, last do
      local hash = hashes[i]
      if not seen[hash] then
        seen[hash] = true
        local value = values[i - first + 1]
        local new, changed = known_new[value], known_changed[value]
        if new == nil then
          if store then
            new, changed = value_with(value, holder, tier_bit, flags)
          else
            new, changed = value_without(value, holder, tier_bit)
          end
          known_new[value], known_changed[value] = new, changed
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
        if changed then
          changed_blocks = changed_blocks + 1
          local low, high = read('<I4I4', hash)
          sum_low = sum_low + bxor(low, scope_low) % TWO32
          sum_high = sum_high + bxor(high, scope_high) % TWO32
        end
      end
    end
    if n > 0 then
      redis.call('HSET', op.blocks, unpack(set, 1, n))
    end
    if m > 0 then
      redis.call('HDEL', op.blocks, unpack(gone, 1, m))
      if op.side then
        for i = 1, m do
          unlink(op.side, gone[i])
        end
      end
    end
  end
  local sign = store and 1 or -1
  digest[at] = digest[at] + sign * changed_blocks
  digest[at + 1] = (digest[at + 1] + sign * sum_low) % TWO32
  digest[at + 2] = (digest[at + 2] + sign * sum_high) % TWO32
  return changed_blocks, bytes
end
