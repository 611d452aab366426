"""Training steps of the user's own: several optimizers, gradients of gradients, teachers, losses by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from budgets import assert_same_training
from networks import layers

ops = keras.ops
DRAWN = np.random.default_rng(3)
IMAGES = DRAWN.random((32, 8, 8, 3), np.float32)
LABELS = DRAWN.integers(0, 4, 32)


def _sgd():
    return keras.optimizers.SGD(0.02, momentum=0.9)


def _conv(width=8, **arguments):
    return layers.Conv2D(width, 3, padding="same", activation="swish", **arguments)


def _features(depth=3):
    return keras.Sequential([layers.Input((8, 8, 3)), *(_conv() for _ in range(depth)), layers.GlobalAveragePooling2D()])


def _critic():
    return keras.Sequential([_features(), layers.Dense(1)])


def _generator():
    return keras.Sequential([layers.Input((6,)), layers.Dense(4 * 4 * 8, activation="swish"), layers.Reshape((4, 4, 8)),
                             layers.BatchNormalization(),
                             layers.Conv2DTranspose(8, 4, strides=2, padding="same", activation="swish"),
                             _conv(), layers.Conv2D(3, 3, padding="same", activation="sigmoid")])


class Adversarial(keras.Model):
    """A generator and a critic with an optimizer each; noise from a seed that is part of the model."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic, self.seeds = _generator(), _critic(), keras.random.SeedGenerator(5)

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile()
        self.generator_optimizer, self.critic_optimizer = generator_optimizer, critic_optimizer

    def built_for_training(self):
        self.generator_optimizer.build(self.generator.trainable_variables)
        self.critic_optimizer.build(self.critic.trainable_variables)
        return self

    def noise(self, images):
        return keras.random.normal((ops.shape(images)[0], 6), seed=self.seeds)

    def generator_loss(self, images):
        return -ops.mean(ops.log_sigmoid(self.critic(self.generator(self.noise(images), training=True), training=True)))

    def critic_loss(self, images):
        made = self.generator(self.noise(images), training=True)
        return -ops.mean(ops.log_sigmoid(self.critic(images, training=True)) + ops.log_sigmoid(-self.critic(made, training=True)))

    def train_step(self, images):
        losses = {}
        for name, model, optimizer in (("critic", self.critic, self.critic_optimizer),
                                       ("generator", self.generator, self.generator_optimizer)):
            with tf.GradientTape() as tape:
                losses[name] = getattr(self, f"{name}_loss")(images)
            optimizer.apply_gradients(zip(tape.gradient(losses[name], model.trainable_variables), model.trainable_variables))
        return losses


class GradientPenalty(Adversarial):
    """Wasserstein: the critic is held to gradients of length one, by gradients of gradients."""

    def critic_loss(self, images):
        made = self.generator(self.noise(images), training=True)
        between = 0.3 * images + 0.7 * made
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between, training=True)
        gradient = tape.gradient(judged, between)
        penalty = ops.mean((ops.sqrt(ops.sum(ops.square(gradient), axis=(1, 2, 3)) + 1e-6) - 1.0) ** 2)
        return ops.mean(self.critic(made, training=True)) - ops.mean(self.critic(images, training=True)) + 10.0 * penalty

    def generator_loss(self, images):
        return -ops.mean(self.critic(self.generator(self.noise(images), training=True), training=True))


class PersistentTape(keras.Model):
    """Two losses on one tape, each for layers of its own."""

    def __init__(self):
        super().__init__()
        self.body, self.label, self.mean = _features(), layers.Dense(4, activation="softmax"), layers.Dense(1)
        self.body_optimizer = _sgd()

    def call(self, x, training=False):
        features = self.body(x, training=training)
        return self.label(features), self.mean(features)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            label, mean = self(x, training=True)
            label_loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, label))
            mean_loss = ops.mean((mean - ops.mean(x, axis=(1, 2, 3), keepdims=False)[:, None]) ** 2)
            both = label_loss + 0.1 * mean_loss
        heads = [*self.label.trainable_variables, *self.mean.trainable_variables]
        body = self.body.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(label_loss, heads[:2]) + tape.gradient(mean_loss, heads[2:]), heads))
        self.body_optimizer.apply_gradients(zip(tape.gradient(both, body), body))
        del tape
        return {"label": label_loss, "mean": mean_loss}


class Distills(keras.Model):
    """A student that follows a frozen teacher."""

    def __init__(self):
        super().__init__()
        self.teacher = keras.Sequential([_features(), layers.Dense(4)])
        self.teacher.trainable = False
        self.student = keras.Sequential([_features(2), layers.Dense(4)])

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        soft = ops.softmax(self.teacher(x, training=False) / 3.0)
        followed = ops.mean(keras.losses.kl_divergence(soft, ops.softmax(y_pred / 3.0)))
        return 0.3 * super().compute_loss(x, y, y_pred, sample_weight, training) + 0.7 * followed


class Contrastive(keras.Model):
    """Two views of each picture are told from all other pictures (InfoNCE)."""

    def __init__(self):
        super().__init__()
        self.augment = keras.Sequential([layers.RandomFlip(seed=1), layers.RandomTranslation(0.2, 0.2, seed=2)])
        self.encoder = keras.Sequential([_features(), layers.Dense(8)])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            views = [ops.normalize(self.encoder(self.augment(x, training=True), training=True)) for _ in range(2)]
            alike = ops.matmul(views[0], ops.transpose(views[1])) / 0.1
            labels = ops.arange(ops.shape(x)[0])
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, alike, from_logits=True))
        self.optimizer.apply(tape.gradient(loss, self.encoder.trainable_variables), self.encoder.trainable_variables)
        return {"loss": loss}


class Variational(keras.Model):
    """Reconstruction plus divergence, the latent drawn by reparametrization; trackers of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = keras.Sequential([_features(), layers.Dense(12)]), _generator()
        self.seeds = keras.random.SeedGenerator(5)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "divergence")]

    @property
    def metrics(self):
        return self.trackers

    def train_step(self, x):
        with tf.GradientTape() as tape:
            mean, log_variance = ops.split(self.encoder(x, training=True), 2, axis=-1)
            latent = mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)
            made = self.decoder(latent, training=True)
            reconstruction = ops.mean(ops.sum(keras.losses.binary_crossentropy(x, made), axis=(1, 2)))
            divergence = -0.5 * ops.mean(ops.sum(1 + log_variance - mean ** 2 - ops.exp(log_variance), axis=-1))
            loss = reconstruction + divergence
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for tracker, value in zip(self.trackers, (loss, reconstruction, divergence)):
            tracker.update_state(value)
        return {tracker.name: tracker.result() for tracker in self.trackers}


def _adversarial(cls):
    def make():
        model = cls()
        model.compile(_sgd(), _sgd())
        return model.built_for_training()
    return make


def _compiled(cls, **arguments):
    def make():
        model = cls()
        model.compile(_sgd(), **arguments)
        return model
    return make


KINDS = {
    "two optimizers (DCGAN)": (_adversarial(Adversarial), (IMAGES,)),
    "gradient penalty (WGAN-GP)": (_adversarial(GradientPenalty), (IMAGES,)),
    "persistent tape": (_compiled(PersistentTape), (IMAGES, LABELS)),
    "frozen teacher (distillation)": (_compiled(Distills, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)),
                                      (IMAGES, LABELS)),
    "contrastive loss": (_compiled(Contrastive), (IMAGES,)),
    "reconstruction and divergence (VAE)": (_compiled(Variational), (IMAGES,)),
}


@pytest.mark.kind("own training steps")
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_the_users_own_equal_plain_keras(kind):
    make, batch = KINDS[kind]

    def fresh():
        keras.utils.set_random_seed(7)
        return make()
    data = tf.data.Dataset.from_tensors(batch if len(batch) > 1 else batch[0]).repeat(3)
    assert_same_training(fresh, lambda model: model.fit(data, verbose=0, shuffle=False), rtol=1e-4)
