-- Finds those predictions (prefixes that workers are about to hold) that a chain begins with.

local LONG = 4096 -- a prediction counts once more for every LONG bytes of its hashes

-- Returns how many leading steps two packed chains have in common: if two hashes are equal, so are all hashes before them.
local function shared(chain, offset, hashes)
  local low, high = 1, math.min(#chain - offset, #hashes) / HASH_BYTES
  while low < high do
    local middle = math.ceil((low + high) / 2)
    local last = middle * HASH_BYTES
    if string.sub(chain, offset + last - 7, offset + last) == string.sub(hashes, last - 7, last) then
      low = middle
    else
      high = middle - 1
    end
  end
  return low
end

-- Returns the predictions that share a prefix with a chain, as a list of { id, prediction, steps = leading steps of the
-- chain that it covers, whole = is all of the prediction shared? }; and how many of `left` it may still read.
local function matches_of(keys, chain, now, left)
  local matches, chain_steps = {}, #chain / HASH_BYTES
  for first = 0, chain_steps - 1, CHUNK do
    local probed = math.min(CHUNK, chain_steps - first)
    local probes = { struct.unpack(string.rep('c' .. HASH_BYTES, probed), chain, first * HASH_BYTES + 1) }
    local found = redis.call('HMGET', keys[ANCHORS], unpack(probes, 1, probed)) -- followed by the next position
    for i = 1, probed do
      local ids = found[i]
      if ids then
        if #ids > MOST_ANCHORED * ID_BYTES then
          damaged('anchor')
        end
        for at = 1, #ids, ID_BYTES do
          if left <= 0 then
            return matches, 0
          end
          local id = string.sub(ids, at, at + ID_BYTES - 1)
          local prediction, first_step = get_prediction(keys, id), first + i - 1
          if not prediction then
            damaged('anchor')
          end
          local hashes = prediction[P_HASHES]
          left = left - 1 - math.floor(#hashes / LONG)
          if prediction[P_ENDS_US] > now and prediction[P_FIRST_STEP] == first_step then
            local steps = shared(chain, first_step * HASH_BYTES, hashes)
            matches[#matches + 1] = {
              id = id, prediction = prediction, steps = first_step + steps, whole = steps * HASH_BYTES == #hashes,
            }
          end
        end
      end
    end
  end
  return matches, left
end
